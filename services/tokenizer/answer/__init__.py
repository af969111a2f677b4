"""An answer: from the tokens of its choices to responses for the client, and what is counted of it."""
