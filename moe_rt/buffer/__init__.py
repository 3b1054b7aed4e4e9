"""Buffer, its handles, and how layers share buffers."""
