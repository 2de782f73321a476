"""Text files to documents and tokens: finding, reading, keeping what was tokenised."""
