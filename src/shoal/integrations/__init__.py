"""Bridges to other trainers, each imported only when used."""
