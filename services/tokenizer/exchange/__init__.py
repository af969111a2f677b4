"""The stream to the cell's scheduler, and recovery when a scheduler is lost."""
