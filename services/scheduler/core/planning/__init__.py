"""Plans a step: which prompts it computes, which sequences it decodes, and who makes way for whom."""
