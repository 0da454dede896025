"""What `import finetune` offers to other programs: forecasts and memory techniques for plain TRL and transformers trainers."""
