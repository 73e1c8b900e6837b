"""HTTP/1.1 on sockets of our own: payloads go straight to and from their memory."""
