"""The session of this process at its node agent: a socket, requests and answers, shared memory."""
