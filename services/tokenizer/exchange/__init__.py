"""The stream to the cell's scheduler: submitting requests, receiving tokens, and recovery when a scheduler is lost."""
