"""The stream to the schedulers: what is submitted, what comes back, and what happens when one dies."""
