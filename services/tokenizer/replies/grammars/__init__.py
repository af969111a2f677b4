"""Grammars of replies that must have a form or call a tool, in each family's own markup."""
