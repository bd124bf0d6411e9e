"""The active rows on the device."""
