"""Plans a step: which prompts it computes, which sequences it decodes, and which make way for others."""
