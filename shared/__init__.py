"""What the services and the command line share. It imports no service."""
