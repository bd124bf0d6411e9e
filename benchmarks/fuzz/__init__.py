"""A fuzzer of all doors: one tenant sends what no client should, another's answers stay right.

Tenant mallory attacks a gateway and two workers over HTTP, gRPC and the workers' own port, while
tenant ann talks; her answers are compared with the answers of a service without an attacker.
"""
