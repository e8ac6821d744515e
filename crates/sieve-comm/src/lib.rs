//! Several processes that train one model: who is who, sums over all of them, and what happens when one is lost.
//!
//! Rank 0 is the middle of a star of TCP connections, two to each other rank. One carries values, and only when all
//! ranks ask for it. The other carries a sign of life every two seconds, errors and farewells, and is read by a thread
//! of its own: a lost rank is noticed also while this one waits for it.

mod error;
mod frame;
mod mesh;
mod pieces;
mod port;
mod watch;
mod world;

pub use error::{CommError, Failure, Loss};
pub use mesh::{Mesh, Patience, Work, place};
pub use pieces::Pieces;
pub use port::HeldPort;
pub use watch::CollectiveCounts;
pub use world::World;
