"""The peers: a session held by kvrecall's service, by transformers, by llama.cpp, by kvpress."""
