{{/*
A small head, and workers on spot nodes that come while there is work and go after it: the spec of the cluster that
stands, and of those that RayJob and RayCronJob make. Kueue admits a cluster as a whole: with a queue its workers are
there from the start, since Kueue refuses clusters that Ray's autoscaler makes larger.
*/}}
{{- define "swiftbatch.cluster" -}}
{{- with .Values.workers }}
{{- if gt (int .min) (int .max) }}
{{- fail (printf "workers.min: found %v, expected at most workers.max = %v" .min .max) }}
{{- end }}
{{- end }}
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
  rayStartParams:
    num-cpus: "0" # the driver runs here, workers don't
    object-store-memory: "100000000" # reports are small
  template:
    {{- include "swiftbatch.rayPod" (dict "root" . "component" "head" "values" .Values.head "spot" "never") | nindent 4 }}
workerGroupSpecs:
  - groupName: workers
    replicas: {{ ternary .Values.workers.max .Values.workers.min (not (empty .Values.queueName)) }}
    minReplicas: {{ .Values.workers.min }}
    maxReplicas: {{ .Values.workers.max }}
    rayStartParams:
      object-store-memory: "100000000"
    template:
      {{- $worker := dict "root" . "component" "worker" "values" .Values.workers "spot" .Values.workers.spot }}
      {{- include "swiftbatch.rayPod" $worker | nindent 6 }}
{{- end }}

{{/* The pod of a head or a worker, the `component`, with its `values`; `spot` is never, prefer, only or any. */}}
{{- define "swiftbatch.rayPod" -}}
{{- $root := .root }}
{{- $isHead := eq .component "head" }}
metadata:
  labels:
    {{- include "swiftbatch.podLabels" . | nindent 4 }}
  annotations:
    ray.io/overwrite-container-cmd: "true" # see `args`
    {{- if $isHead }}
    {{- include "swiftbatch.unmoved" . | nindent 4 }}
    {{- end }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "swiftbatch.placement" . | nindent 2 }}
  {{- with mergeOverwrite (fromYaml (include "swiftbatch.spot" .)) .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  # a spot node gives 30 s (Azure, Google) to 120 s (Amazon). A worker writes its checkpoints in graceSeconds (20),
  # Ray waits 10 s longer in its drain time-out (30), and the pod 15 s longer than that (45)
  terminationGracePeriodSeconds: {{ add $root.Values.graceSeconds 25 }}
  securityContext:
    {{- include "swiftbatch.podSecurity" (dict "ownsVolumes" true) | nindent 4 }}
  containers:
    - name: ray-{{ .component }}
      {{- include "swiftbatch.image" $root | nindent 6 }}
      command: [/bin/bash, -c, --]
      # The image's files are read-only, and Triton adds to its compiled kernels. `ray start` itself has to be process 1:
      # SIGTERM makes it drain the node, and a shell in front would swallow it
      args:
        - test ! "$TRITON_CACHE_DIR" || cp -rT "$TRITON_CACHE_DIR" /tmp/triton; export TRITON_CACHE_DIR=/tmp/triton;
          ulimit -n 65536; exec /bin/bash -c "exec $KUBERAY_GEN_RAY_START_CMD"
      {{- include "swiftbatch.environment" . | nindent 6 }}
      ports:
        - { name: metrics, containerPort: 8080 }
        {{- if $isHead }}
        - { name: gcs, containerPort: 6379 }
        - { name: dashboard, containerPort: 8265 }
        - { name: client, containerPort: 10001 }
        - { name: driver-metrics, containerPort: 9400 }
        {{- end }}
      {{- include "swiftbatch.resources" .values | nindent 6 }}
      livenessProbe:
        httpGet: { path: /api/local_raylet_healthz, port: 52365 }
        initialDelaySeconds: 60
        periodSeconds: 15
        timeoutSeconds: 5
        failureThreshold: 8
      readinessProbe:
        httpGet: {{ ternary "{ path: /api/gcs_healthz, port: 8265 }" "{ path: /api/local_raylet_healthz, port: 52365 }" $isHead }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      securityContext:
        {{- include "swiftbatch.confined" . | nindent 8 }}
      volumeMounts:
        {{- include "swiftbatch.mounts" . | nindent 8 }}
  volumes:
    {{- include "swiftbatch.volumes" . | nindent 4 }}
{{- end }}

{{/* Each expression is one cloud's label of spot nodes: a node is one by any of them, and is none by all. */}}
{{- define "swiftbatch.spot" -}}
{{- $operator := ternary "NotIn" "In" (eq .spot "never") }}
{{- $expressions := list
  (dict "key" "cloud.google.com/gke-spot" "operator" $operator "values" (list "true"))
  (dict "key" "eks.amazonaws.com/capacityType" "operator" $operator "values" (list "SPOT"))
  (dict "key" "karpenter.sh/capacity-type" "operator" $operator "values" (list "spot"))
  (dict "key" "kubernetes.azure.com/scalesetpriority" "operator" $operator "values" (list "spot")) }}
{{- if ne .spot "any" }}
nodeAffinity:
  {{- if eq .spot "prefer" }}
  preferredDuringSchedulingIgnoredDuringExecution:
    {{- range $expressions }}
    - { weight: 100, preference: { matchExpressions: [{{ toJson . }}] } }
    {{- end }}
  {{- else }}
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- if eq .spot "never" }}
      - matchExpressions: {{ toJson $expressions }}
      {{- else }}
      {{- range $expressions }}
      - matchExpressions: [{{ toJson . }}]
      {{- end }}
      {{- end }}
  {{- end }}
{{- end }}
{{- end }}
