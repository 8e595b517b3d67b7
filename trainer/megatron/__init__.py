"""Megatron-Core underneath: model building, parallel layout, the CPU device shim, HF <-> Megatron names.

Nothing is imported here: `hf_config` and `hf_files` work without torch, the rest imports Megatron-Core.
"""
