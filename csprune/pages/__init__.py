"""What a person looks at: the pictures, the page and the summary of reports."""
