"""grape_pe"""
