"""Configuration that ranks agree on before they share memory."""
