"""The paper's analysis of a model's unembedding, each analysis a function from a study to a result."""
