"""Authentication: join tokens and TLS certificates, read again when their files change."""
