"""The processes of one TP group: the leader relays its steps to the members."""
