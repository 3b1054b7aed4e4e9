"""What ranks agree on before they share memory."""
