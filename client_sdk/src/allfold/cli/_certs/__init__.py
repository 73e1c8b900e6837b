"""``allfold certs``: certificates for a deployment."""
