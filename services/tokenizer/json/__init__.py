"""JSON from clients and models, read strictly: values and schemas."""
