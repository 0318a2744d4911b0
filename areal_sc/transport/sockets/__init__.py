"""ZMQ sockets on an event loop, connections to many servers, and where to listen."""
