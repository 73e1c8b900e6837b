"""Who may talk to whom: join tokens and certificates, read again when their files change."""
