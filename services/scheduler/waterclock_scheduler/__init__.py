"""Scheduler: prediction, order, pools and the degradation ladder."""
