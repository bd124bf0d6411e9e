{{- /* Pod of a worker: (list . "worker"), or (list . "worker-rank") for a further machine of one, which serves nothing. */}}
{{- define "kvrecall.workerPod" -}}
{{- $component := index . 1 -}}
{{- with index . 0 -}}
{{- $v := .Values.worker -}}
{{- $divided := $v.tensorParallel -}}
{{- $name := include "kvrecall.worker" . -}}
{{- $image := ternary .Values.image.workerCuda .Values.image.worker (gt (int $v.gpu.count) 0) -}}
metadata:
  labels:
    {{- with $v.podLabels }}{{- toYaml . | nindent 4 }}{{- end }}
    {{- include "kvrecall.labels" (list . $component) | nindent 4 }}
  annotations:
    checksum/config: {{ include (print .Template.BasePath "/worker/configmap.yaml") . | sha256sum }}
    checksum/secrets: {{ include (print .Template.BasePath "/secrets.yaml") . | sha256sum }}
    {{- with $v.podAnnotations }}{{- toYaml . | nindent 4 }}{{- end }}
spec:
  {{- include "kvrecall.podStart" . | nindent 2 }}
  # The record in Redis says that the worker drains: gateways need no time to learn of it.
  terminationGracePeriodSeconds: {{ add $v.drainSeconds 30 }}
  {{- with $v.gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- include "kvrecall.placement" (list . $component $v) | nindent 2 }}
  {{- if eq $v.storage.type "hostPath" }}
  initContainers:
    # A folder of the node is root's: fsGroup does not change it.
    - name: own-data
      image: {{ include "kvrecall.image" (list . $image) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [chown, "10001:10001", /var/lib/kvrecall]
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN]}
      volumeMounts:
        - {name: data, mountPath: /var/lib/kvrecall}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "kvrecall.image" (list . $image) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if gt (int $divided.machines) 1 }}
      command:
        - python3
        - -m
        - torch.distributed.run
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --nproc-per-node={{ div (int $divided.size) (int $divided.machines) }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port={{ $divided.port }}
        - -m
        - kvrecall_server.cli
      {{- end }}
      args:
        - worker
        - --listen=0.0.0.0:8421
        - --name=$(POD_NAME)
        - --advertise=$(POD_NAME).{{ $name }}.$(POD_NAMESPACE).svc:8421
        - --ops=0.0.0.0:9421
        # A folder of its own: workers of one node may share a disk.
        - --data=/var/lib/kvrecall/$(POD_NAME)
      envFrom:
        - configMapRef: {name: {{ $name }}}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_NAMESPACE
          valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
        {{- include "kvrecall.sharedSecretEnv" (list . "KVRECALL_SERVER__TOKEN") | trim | nindent 8 }}
        {{- if include "kvrecall.hasRedis" . }}
        - name: KVRECALL_STORE__REDIS_URL
          valueFrom: {secretKeyRef: {name: {{ include "kvrecall.redisSecret" . }}, key: store-url}}
        {{- end }}
        {{- with $v.model.tokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: hub-token}}
        {{- end }}
        {{- with $v.extraEnv }}{{- toYaml . | nindent 8 }}{{- end }}
      {{- if eq $component "worker" }}
      ports:
        - {name: grpc, containerPort: 8421}
        - {name: ops, containerPort: 9421}
      {{- include "kvrecall.probes" "ops" | nindent 6 }}
      {{- end }}
      {{- $resources := deepCopy $v.resources }}
      {{- if gt (int $v.gpu.count) 0 }}
      {{- $limits := merge (dict $v.gpu.resource (int $v.gpu.count)) (default dict $resources.limits) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- include "kvrecall.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /var/lib/kvrecall}
        - {name: tmp, mountPath: /tmp}
        {{- if ne .Values.tls.mode "none" }}
        - {name: tls, mountPath: /etc/kvrecall/tls, readOnly: true}
        {{- end }}
        {{- if eq $v.model.source "hub" }}
        - {name: models, mountPath: /var/cache/huggingface}
        {{- else if ne $v.model.source "reference" }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}{{- toYaml . | nindent 8 }}{{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if eq $v.storage.type "hostPath" }}
    - name: data
      hostPath: {path: {{ $v.storage.path }}, type: DirectoryOrCreate}
    {{- else if eq $v.storage.type "existingClaim" }}
    - name: data
      persistentVolumeClaim: {claimName: {{ $v.storage.claim }}}
    {{- else if eq $v.storage.type "emptyDir" }}
    - name: data
      emptyDir: {sizeLimit: {{ $v.storage.size }}}
    {{- end }}
    {{- if ne .Values.tls.mode "none" }}
    - name: tls
      secret: {secretName: {{ include "kvrecall.tlsSecret" (list . $component) }}, defaultMode: 288}
    {{- end }}
    {{- if and (eq $v.model.source "hub") $v.model.cache }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $v.model.cache }}}
    {{- else if eq $v.model.source "hub" }}
    - {name: models, emptyDir: {}}
    {{- else if eq $v.model.source "pvc" }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $v.model.claim }}, readOnly: true}
    {{- else if eq $v.model.source "hostPath" }}
    - name: models
      hostPath: {path: {{ $v.model.path }}, type: Directory}
    {{- end }}
    {{- with $v.extraVolumes }}{{- toYaml . | nindent 4 }}{{- end }}
{{- end }}
{{- end }}

{{- /* Claim of a worker's data. */}}
{{- define "kvrecall.workerClaims" -}}
{{- with .Values.worker.storage -}}
persistentVolumeClaimRetentionPolicy:
  whenScaled: {{ .whenScaled }}
  whenDeleted: {{ .whenDeleted }}
volumeClaimTemplates:
  - metadata:
      name: data
      labels: {{- include "kvrecall.selector" (list $ "worker") | nindent 8 }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests: {storage: {{ .size }}}
{{- end }}
{{- end }}
