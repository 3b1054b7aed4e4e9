"""Adapters for other libraries. Each module is imported explicitly and needs the library it is named after."""
