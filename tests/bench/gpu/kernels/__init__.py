"""Each kernel beside torch's and conch's."""
