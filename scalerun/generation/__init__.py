"""From prompts to text: sampling, beam search, and what a growing batch keeps."""
