"""What both kinds of process need: configuration, wire messages, transport, supervision. Imports neither side."""
