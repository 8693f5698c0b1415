//! Holds the sandbox's containers and their processes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use peerpod_proto::agent::{CreateContainerRequest, Process as Specification};

use crate::cgroup::Cgroup;
use crate::error;
use crate::process::{Bind, Inside, Process};

/// All containers of the sandbox. The lock covers look-ups only and is never held across a wait.
#[derive(Default)]
pub(crate) struct Containers(Mutex<HashMap<String, Container>>);

struct Container {
    netns: Option<PathBuf>,
    /// Root of a pulled image; `None`: the VM's own root.
    rootfs: Option<PathBuf>,
    /// Bind mounts of volumes, which only this container has.
    binds: Vec<Bind>,
    /// `Some` for a container with a memory limit.
    cgroup: Option<Arc<Cgroup>>,
    first: First,
    execs: HashMap<String, Arc<Process>>,
}

fn ready(id: &str) -> PathBuf {
    Path::new("/run").join(format!("peerpod-test-agent-{id}.ready"))
}

/// Processes of a removed container, and its cgroup.
type Removed = (Vec<Arc<Process>>, Option<Arc<Cgroup>>);

/// A container's own process, before and after StartContainer.
enum First {
    Created(Box<Specification>),
    Started(Arc<Process>),
}

impl Containers {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Container>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// CreateContainer: checks the request and starts nothing.
    pub(crate) fn create(
        &self,
        request: CreateContainerRequest,
        rootfs: Option<PathBuf>,
    ) -> ttrpc::Result<()> {
        let specification = request.OCI.into_option().ok_or_else(|| error::errno(Errno::EINVAL))?;
        let linux = specification.Linux.into_option().unwrap_or_default();
        let limit = linux.Resources.Memory.Limit;
        let namespaces = linux.Namespaces;
        let netns = namespaces
            .into_iter()
            .find(|namespace| namespace.Type == "network" && !namespace.Path.is_empty());
        let netns = netns.map(|namespace| PathBuf::from(namespace.Path));
        if netns.as_ref().is_some_and(|path| !path.exists()) {
            return Err(error::errno(Errno::ENOENT));
        }
        for mount in specification.Mounts.iter().filter(|mount| mount.type_ == "bind") {
            if !Path::new(&mount.source).exists() {
                return Err(error::errno(Errno::ENOENT));
            }
        }
        let binds: Vec<Bind> = specification.Mounts.iter().filter_map(Bind::of).collect();
        let process = specification.Process.into_option().ok_or_else(|| error::errno(Errno::EINVAL))?;
        let first = First::Created(Box::new(process));
        let mut containers = self.lock();
        if containers.contains_key(&request.container_id) {
            return Err(error::errno(Errno::EEXIST));
        }
        let cgroup =
            (limit > 0 && Cgroup::are_there()).then(|| Cgroup::new(&request.container_id, limit)).transpose();
        let cgroup = cgroup.map_err(error::io)?.map(Arc::new);
        let container = Container { netns, rootfs, binds, cgroup, first, execs: HashMap::new() };
        containers.insert(request.container_id, container);
        Ok(())
    }

    /// StartContainer.
    pub(crate) fn start(&self, id: &str) -> ttrpc::Result<()> {
        let mut containers = self.lock();
        let container = containers.get_mut(id).ok_or_else(error::no_container)?;
        let First::Created(specification) = &container.first else { return Err(error::errno(Errno::EEXIST)) };
        let ready = ready(id);
        std::fs::remove_file(&ready).ok();
        let inside = Inside::new(&container.binds, &ready);
        let (netns, rootfs) = (container.netns.as_deref(), container.rootfs.as_deref());
        let cgroup = container.cgroup.as_ref().map(|cgroup| cgroup.folder());
        let process = Process::start(specification, netns, rootfs, cgroup, inside)?;
        container.first = First::Started(process);
        Ok(())
    }

    /// Returns the file that appears when a started container has its mounts; `None` without own mounts.
    pub(crate) fn waits_for(&self, id: &str) -> Option<PathBuf> {
        let containers = self.lock();
        (!containers.get(id)?.binds.is_empty()).then(|| ready(id))
    }

    /// ExecProcess.
    pub(crate) fn exec(&self, id: &str, exec: String, specification: &Specification) -> ttrpc::Result<()> {
        let mut containers = self.lock();
        let container = containers.get_mut(id).ok_or_else(error::no_container)?;
        if container.execs.contains_key(&exec) || exec.is_empty() {
            return Err(error::errno(Errno::EEXIST));
        }
        let inside = match &container.first {
            First::Started(first) if !container.binds.is_empty() => Inside::Of(first.pid()),
            _ => Inside::Nothing,
        };
        let (netns, rootfs) = (container.netns.as_deref(), container.rootfs.as_deref());
        let cgroup = container.cgroup.as_ref().map(|cgroup| cgroup.folder());
        let process = Process::start(specification, netns, rootfs, cgroup, inside)?;
        container.execs.insert(exec, process);
        Ok(())
    }

    /// Returns the process of an exec id; an empty id is the container's own process.
    pub(crate) fn process(&self, id: &str, exec: &str) -> ttrpc::Result<Arc<Process>> {
        let containers = self.lock();
        let container = containers.get(id).ok_or_else(error::no_container)?;
        if !exec.is_empty() {
            return container.execs.get(exec).cloned().ok_or_else(error::no_exec);
        }
        match &container.first {
            First::Started(process) => Ok(process.clone()),
            First::Created(_) => Err(error::invalid("cannot find init process!")),
        }
    }

    /// Removes an exec after its exit was reported.
    pub(crate) fn reaped(&self, id: &str, exec: &str) {
        if let Some(container) = self.lock().get_mut(id) {
            container.execs.remove(exec);
        }
    }

    /// SignalProcess with an empty exec id: signals the container's own process, and with SIGKILL all others too. A
    /// container that has ended is no error, as recorded.
    pub(crate) fn signal_all(&self, id: &str, signal: u32) -> ttrpc::Result<()> {
        let containers = self.lock();
        let container = containers.get(id).ok_or_else(error::no_container)?;
        let First::Started(first) = &container.first else {
            return Err(error::invalid("cannot find init process!"));
        };
        if signal == 9 {
            first.kill_group();
            container.execs.values().for_each(|process| process.kill_group());
            return Ok(());
        }
        match first.signal(signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(other) => Err(error::errno(other)),
        }
    }

    /// Removes a container and ends all its processes. Returns the processes, which the caller waits for, and the
    /// cgroup, which it keeps until then.
    pub(crate) fn remove(&self, id: &str) -> ttrpc::Result<Removed> {
        let container = self.lock().remove(id).ok_or_else(error::no_container)?;
        let mut processes: Vec<_> = container.execs.into_values().collect();
        if let First::Started(first) = container.first {
            processes.push(first);
        }
        processes.iter().for_each(|process| process.kill_group());
        Ok((processes, container.cgroup))
    }

    /// Returns a container in which the kernel has killed a process for its memory limit since the last call.
    pub(crate) fn out_of_memory(&self) -> Option<String> {
        let limited: Vec<_> = {
            let containers = self.lock();
            containers.iter().filter_map(|(id, one)| Some((id.clone(), one.cgroup.clone()?))).collect()
        };
        limited.into_iter().find_map(|(id, cgroup)| cgroup.killed().then_some(id))
    }

    /// Returns every process of a container, for statistics.
    pub(crate) fn processes(&self, id: &str) -> ttrpc::Result<Vec<i32>> {
        let containers = self.lock();
        let container = containers.get(id).ok_or_else(error::no_container)?;
        let mut processes: Vec<i32> = container.execs.values().map(|process| process.pid()).collect();
        if let First::Started(first) = &container.first {
            processes.insert(0, first.pid());
        }
        Ok(processes)
    }

    /// Removes all containers.
    pub(crate) fn remove_all(&self) {
        let ids: Vec<String> = self.lock().keys().cloned().collect();
        for id in ids {
            // Another call may have removed it meanwhile.
            drop(self.remove(&id));
        }
    }
}
