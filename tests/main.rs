//! Tests that cross crates.
#![allow(clippy::disallowed_methods, reason = "paths of tests")]

mod python;
mod random_model;

mod parity_causality;
mod parity_decode;
mod parity_m3;
mod parity_transformers;

mod killed_rank;
mod tiny_run;

mod bf16_weights;
mod chat;
mod command_line;
mod conversions;
mod damaged_texts;
mod data_commands;
mod data_safetensors;
mod dma_form;
mod equal_bits;
mod export_kill;
mod export_memory;
mod hub;
mod initial_weights;
mod library_page;
mod operator;
mod pipes;
mod printed_commands;
mod resume_kill;
mod serve;
mod serve_chat;
mod serve_kept;
mod serve_pages;
mod serve_structures;
mod sessions;
mod train_faults;
mod train_gradients;
mod train_guard;
mod train_guard_runs;
mod train_indexer;
mod train_ranks;
mod train_ranks_killed;
mod train_ranks_killed_inside;
mod train_ranks_late;
mod train_ranks_matrix;
mod train_run;
mod unwritable;
mod what_is_trained;
mod words_model;

// Tests of what lies in lab/ alone.
#[path = "../lab/tests/damaged_tasks.rs"]
mod damaged_tasks;
#[path = "../lab/tests/kernel_branches.rs"]
mod kernel_branches;
#[path = "../lab/tests/kernels_cli.rs"]
mod kernels_cli;
#[path = "../lab/tests/scripts.rs"]
mod lab_scripts;
#[path = "../lab/tests/tasks_cli.rs"]
mod tasks_cli;
