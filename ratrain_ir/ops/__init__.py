"""The operations of a schedule: fields, operands, messages, likeness."""
