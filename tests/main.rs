//! Tests that cross crates.

mod python;
mod random_model;

mod parity_causality;
mod parity_decode;
mod parity_transformers;

mod tiny_run;

mod bf16_weights;
mod command_line;
mod damaged_texts;
mod data_commands;
mod data_safetensors;
mod kernel_branches;
mod kernels_cli;
mod next_lines;
mod operator;
mod plan_recipes;
mod resume_damage;
mod resume_kill;
mod ruler_cli;
mod sessions;
mod tasks_cli;
mod train_ends;
mod train_faults;
mod train_gradients;
mod train_guard;
mod train_guard_runs;
mod train_ranks;
mod train_ranks_faults;
mod train_ranks_killed;
mod train_ranks_late;
mod train_row_parts;
mod train_run;
mod train_stages;
mod wrong_inputs;
