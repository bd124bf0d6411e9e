"""What lies across sessions, in slots of its own: indexes, sums of tenants, trees and references of pages."""
