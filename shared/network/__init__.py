"""How processes talk over a network: servers, channels, TLS, health, and the management port."""
