"""lm-evaluation-harness on the original and truncated checkpoints, item by item."""
