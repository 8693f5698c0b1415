//! A node that answers the calls from the relay, records them, and can hang or go away.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use peerpod_proto::hypervisor::{
    CreateVMRequest, CreateVMResponse, StartVMRequest, StartVMResponse, StopVMRequest, StopVMResponse,
    VersionRequest, VersionResponse,
};
use peerpod_proto::hypervisor_ttrpc::{Hypervisor, create_hypervisor};
use peerpod_proto::node::{ClaimRequest, ClaimResponse, ReadInboxRequest, ReadInboxResponse};
use peerpod_proto::node_ttrpc::{Node as NodeService, create_node};
use peerpod_proto::podvminfo::{GetInfoRequest, GetInfoResponse};
use peerpod_proto::podvminfo_ttrpc::{PodVmInfo, create_pod_vm_info};
use ttrpc::Code;
use ttrpc::r#async::{Server, TtrpcContext};

#[derive(Default)]
pub struct Memory {
    /// Calls in the order of their arrival, like `CreateVM a`.
    pub calls: Mutex<Vec<String>>,
    /// Methods that are never answered.
    pub hang: Mutex<HashSet<String>>,
    /// Certificate chain for claims with the secret `secret`.
    pub chain: Mutex<Vec<Vec<u8>>>,
    inbox: Mutex<PathBuf>,
}

impl Memory {
    pub fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    async fn seen(&self, method: &str, id: &str) {
        self.calls.lock().unwrap().push(format!("{method} {id}").trim().to_owned());
        let hangs = self.hang.lock().unwrap().contains(method);
        if hangs {
            std::future::pending::<()>().await;
        }
    }
}

pub struct Node {
    server: Server,
    socket: PathBuf,
}

struct Service(Arc<Memory>);

impl Node {
    pub async fn start(world: &super::World, memory: Arc<Memory>) -> Node {
        let socket = world.run("node.sock");
        *memory.inbox.lock().unwrap() = world.config.state_dir.join("inbox");
        drop(std::fs::remove_file(&socket));
        let service = Arc::new(Service(memory));
        let mut server = Server::new()
            .bind(&format!("unix://{}", socket.display()))
            .unwrap()
            .register_service(create_hypervisor(service.clone()))
            .register_service(create_pod_vm_info(service.clone()))
            .register_service(create_node(service));
        server.start().await.unwrap();
        Node { server, socket }
    }

    /// Stops as a killed process does: connections end without notice.
    pub async fn kill(mut self) {
        drop(std::fs::remove_file(&self.socket));
        self.server.shutdown().await.unwrap();
    }
}

#[async_trait]
impl Hypervisor for Service {
    async fn create_vm(&self, _: &TtrpcContext, request: CreateVMRequest) -> ttrpc::Result<CreateVMResponse> {
        self.0.seen("CreateVM", &request.id).await;
        Ok(CreateVMResponse { agentSocketPath: format!("/path/of/{}", request.id), ..Default::default() })
    }

    async fn start_vm(&self, _: &TtrpcContext, request: StartVMRequest) -> ttrpc::Result<StartVMResponse> {
        self.0.seen("StartVM", &request.id).await;
        if request.id == "fails" {
            let status = ttrpc::get_status(Code::FAILED_PRECONDITION, "no such image: try another");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        Ok(StartVMResponse::new())
    }

    async fn stop_vm(&self, _: &TtrpcContext, request: StopVMRequest) -> ttrpc::Result<StopVMResponse> {
        self.0.seen("StopVM", &request.id).await;
        Ok(StopVMResponse::new())
    }

    async fn version(&self, _: &TtrpcContext, _: VersionRequest) -> ttrpc::Result<VersionResponse> {
        self.0.seen("Version", "").await;
        Ok(VersionResponse { version: "7".into(), ..Default::default() })
    }
}

#[async_trait]
impl PodVmInfo for Service {
    async fn get_info(&self, _: &TtrpcContext, request: GetInfoRequest) -> ttrpc::Result<GetInfoResponse> {
        self.0.seen("GetInfo", &request.PodName).await;
        Ok(GetInfoResponse { VMID: "i-1".into(), ..Default::default() })
    }
}

#[async_trait]
impl NodeService for Service {
    async fn claim(&self, _: &TtrpcContext, request: ClaimRequest) -> ttrpc::Result<ClaimResponse> {
        self.0.seen("Claim", &request.peer_address).await;
        if !request.dialled.is_empty() {
            self.0.seen("Dialled", &request.dialled).await;
        }
        if request.ticket_secret != b"secret" {
            let status = ttrpc::get_status(Code::PERMISSION_DENIED, "the ticket is used");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        let certificates = self.0.chain.lock().unwrap().clone();
        Ok(ClaimResponse { sandbox_id: "sb".into(), certificates, ..Default::default() })
    }

    async fn read_inbox(&self, _: &TtrpcContext, _: ReadInboxRequest) -> ttrpc::Result<ReadInboxResponse> {
        self.0.seen("ReadInbox", "").await;
        let mut handled = 0;
        let folder = self.0.inbox.lock().unwrap().clone();
        for entry in std::fs::read_dir(&folder).unwrap() {
            handled += u32::from(take(&entry.unwrap().path(), &self.0));
        }
        Ok(ReadInboxResponse { handled, ..Default::default() })
    }
}

fn take(path: &Path, memory: &Memory) -> bool {
    let name = path.file_name().unwrap().to_str().unwrap();
    let Some(id) = name.strip_suffix(".json") else { return false };
    let text = std::fs::read_to_string(path).unwrap();
    assert!(
        text.starts_with(&format!("{{\"version\":1,\"op\":\"stop\",\"id\":\"{id}\",\"at_ms\":")),
        "{text}"
    );
    memory.calls.lock().unwrap().push(format!("inbox {id}"));
    std::fs::remove_file(path).unwrap();
    true
}
