"""How a query and a document become the prompt whose next token rates them: the recipes of rerankers."""
