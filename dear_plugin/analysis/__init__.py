"""Which head of a CLIP does what: exact contributions of the heads, and what they carry."""
