//! Several processes that train one model: ranks, collectives over TCP, heartbeats, and what happens when a rank is
//! lost.
//!
//! Rank 0 is the middle of a star of TCP connections, two to each other rank. One carries the values of collectives.
//! The other carries a heartbeat every two seconds, errors and goodbye messages, and is read by a thread of its own, so
//! that a lost rank is noticed even while this one waits for it.

mod error;
mod frame;
mod mesh;
mod pieces;
mod port;
mod watch;
mod world;

pub use error::{CommError, Failure, Loss};
pub use mesh::{Mesh, Timeouts, Work, place};
pub use pieces::Pieces;
pub use port::ReservedPort;
pub use watch::CollectiveCounts;
pub use world::World;
