"""The notebooks that step through the engine. They come later; this package holds their place."""
