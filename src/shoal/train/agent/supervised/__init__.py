"""Supervised steps on play without a model: the warm-up and rehearsal."""
