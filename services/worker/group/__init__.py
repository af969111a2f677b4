"""The processes of one TP group."""
