"""How calls and their arguments are written: as one JSON object, or one by one."""
