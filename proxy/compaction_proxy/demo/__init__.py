"""The demonstration: a scripted model behind the proxy, a real SDK client in front of it. No key, no network."""
