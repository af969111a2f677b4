"""From a public message to tokens and resolved parameters."""
