{{/*
A small head, and workers on spot nodes that come while there is work and go after it: the spec of the cluster that
stands, and of those that RayJob and RayCronJob make. Kueue admits a cluster as a whole: with a queue its workers are
there from the start, since Kueue refuses clusters that Ray's autoscaler makes larger.
*/}}
{{- define "swiftbatch.cluster" -}}
rayVersion: "2.60.0" # as in constraints.txt
authOptions:
  mode: token # KubeRay makes the token, and gives it to every container of the cluster
enableInTreeAutoscaling: {{ not .Values.queueName }}
{{- if not .Values.queueName }}
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: 300
  resources:
    requests:
      cpu: 500m
      memory: 1Gi
    limits:
      memory: 1Gi
  securityContext:
    {{- include "swiftbatch.confined" . | nindent 4 }}
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
    - { name: home, mountPath: /home/swiftbatch }
{{- end }}
headGroupSpec:
  {{- include "swiftbatch.head" . | nindent 2 }}
workerGroupSpecs:
  - {{- include "swiftbatch.workers" . | nindent 4 }}
{{- end }}

{{- define "swiftbatch.head" -}}
rayStartParams:
  num-cpus: "0" # the driver runs here, workers don't
  object-store-memory: "100000000" # reports are small
template:
  metadata:
    labels:
      {{- include "swiftbatch.podLabels" (dict "root" . "component" "head") | nindent 6 }}
    annotations:
      ray.io/overwrite-container-cmd: "true" # see `args`
      # a head that goes takes all workers along: no autoscaler of nodes moves it, and all may move workers
      karpenter.sh/do-not-disrupt: "true"
      cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
  spec:
    serviceAccountName: {{ include "swiftbatch.name" . }}-head
    {{- include "swiftbatch.pullSecrets" . | nindent 4 }}
    {{- with .Values.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    terminationGracePeriodSeconds: {{ add .Values.graceSeconds 25 }}
    securityContext:
      {{- include "swiftbatch.podSecurity" (dict "ownsStore" true) | nindent 6 }}
    affinity:
      nodeAffinity: # never on a spot node
        requiredDuringSchedulingIgnoredDuringExecution:
          nodeSelectorTerms:
            - matchExpressions:
                - { key: cloud.google.com/gke-spot, operator: NotIn, values: ["true"] }
                - { key: eks.amazonaws.com/capacityType, operator: NotIn, values: [SPOT] }
                - { key: karpenter.sh/capacity-type, operator: NotIn, values: [spot] }
                - { key: kubernetes.azure.com/scalesetpriority, operator: NotIn, values: [spot] }
    containers:
      - name: ray-head
        {{- include "swiftbatch.rayContainer" . | nindent 8 }}
        ports:
          - { name: gcs, containerPort: 6379 }
          - { name: dashboard, containerPort: 8265 }
          - { name: client, containerPort: 10001 }
          - { name: metrics, containerPort: 8080 }
          - { name: driver-metrics, containerPort: 9400 }
        resources:
          requests: { cpu: {{ .Values.head.cpu | quote }}, memory: {{ .Values.head.memory }} }
          limits: { memory: {{ .Values.head.memory }} }
        readinessProbe:
          httpGet: { path: /api/gcs_healthz, port: 8265 }
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        volumeMounts:
          {{- include "swiftbatch.mounts" . | nindent 10 }}
          {{- if .Values.inboxConfigMap }}
          - { name: inbox, mountPath: /inbox, readOnly: true }
          {{- end }}
    volumes:
      {{- include "swiftbatch.volumes" . | nindent 6 }}
      {{- with .Values.inboxConfigMap }}
      - { name: inbox, configMap: { name: {{ . }} } }
      {{- end }}
{{- end }}

{{- define "swiftbatch.workers" -}}
groupName: workers
replicas: {{ ternary .Values.workers.max .Values.workers.min (not (empty .Values.queueName)) }}
minReplicas: {{ .Values.workers.min }}
maxReplicas: {{ .Values.workers.max }}
rayStartParams:
  object-store-memory: "100000000"
template:
  metadata:
    labels:
      {{- include "swiftbatch.podLabels" (dict "root" . "component" "worker") | nindent 6 }}
    annotations:
      ray.io/overwrite-container-cmd: "true"
  spec:
    serviceAccountName: {{ include "swiftbatch.name" . }}-worker
    {{- include "swiftbatch.pullSecrets" . | nindent 4 }}
    {{- with .Values.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    # a spot node gives 30 s (Azure, Google) to 120 s (Amazon). A worker writes its checkpoints in graceSeconds (20),
    # Ray waits 10 s longer in its drain time-out (30), and the pod 15 s longer than that (45)
    terminationGracePeriodSeconds: {{ add .Values.graceSeconds 25 }}
    securityContext:
      {{- include "swiftbatch.podSecurity" (dict "ownsStore" true) | nindent 6 }}
    {{- with .Values.workers.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.workers.gpuProduct }}
    nodeSelector:
      nvidia.com/gpu.product: {{ . }}
    {{- end }}
    {{- include "swiftbatch.spot" . | nindent 4 }}
    containers:
      - name: ray-worker
        {{- include "swiftbatch.rayContainer" . | nindent 8 }}
        ports:
          - { name: metrics, containerPort: 8080 }
        {{- $gpus := int .Values.workers.gpus }}
        resources:
          requests:
            cpu: {{ .Values.workers.cpu | quote }}
            memory: {{ .Values.workers.memory }}
            {{- if $gpus }}
            nvidia.com/gpu: {{ $gpus | quote }}
            {{- end }}
          limits:
            memory: {{ .Values.workers.memory }}
            {{- if $gpus }}
            nvidia.com/gpu: {{ $gpus | quote }}
            {{- end }}
        readinessProbe:
          httpGet: { path: /api/local_raylet_healthz, port: 52365 }
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        volumeMounts:
          {{- include "swiftbatch.mounts" . | nindent 10 }}
    volumes:
      {{- include "swiftbatch.volumes" . | nindent 6 }}
{{- end }}

{{/* Each term is one cloud's label of spot nodes; one of them suffices. */}}
{{- define "swiftbatch.spot" -}}
{{- $terms := list
  (dict "key" "cloud.google.com/gke-spot" "operator" "In" "values" (list "true"))
  (dict "key" "eks.amazonaws.com/capacityType" "operator" "In" "values" (list "SPOT"))
  (dict "key" "karpenter.sh/capacity-type" "operator" "In" "values" (list "spot"))
  (dict "key" "kubernetes.azure.com/scalesetpriority" "operator" "In" "values" (list "spot")) }}
{{- if eq .Values.workers.spot "only" }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- range $terms }}
        - matchExpressions: [{{ toJson . }}]
        {{- end }}
{{- else if eq .Values.workers.spot "prefer" }}
affinity:
  nodeAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range $terms }}
      - weight: 100
        preference:
          matchExpressions: [{{ toJson . }}]
      {{- end }}
{{- end }}
{{- end }}
