"""What is sent: hypothesis strategies of adversarial texts, JSON, bodies, and protobuf messages."""
