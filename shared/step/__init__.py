"""What scheduler and worker mean by a step, and how it travels between them."""
